# SPDX-License-Identifier: Apache-2.0
"""A summary in, text out; nothing is computed here but how a figure is written."""
