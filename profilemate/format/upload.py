# SPDX-License-Identifier: Apache-2.0
"""What both ends know of an upload: its object, which says how far it is."""

from __future__ import annotations

UPLOAD_FILE = "upload.json"
"""Beside a session's files in the bucket: whether all of the session is there."""
