# SPDX-License-Identifier: Apache-2.0
"""The words that text and HTML share. Nothing here knows columns, colours or tags."""
