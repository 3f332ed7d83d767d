# SPDX-License-Identifier: Apache-2.0
"""A running session as it is now: what ``profilemate live`` shows.

It reads totals.json, metadata.json and the ends of the open tables, a bounded number of bytes each
time. It reads no journal, writes nothing to the session and asks nothing of vLLM.
"""
