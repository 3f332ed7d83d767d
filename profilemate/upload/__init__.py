# SPDX-License-Identifier: Apache-2.0
"""The uploader: sends a session's closed segments to object storage while vLLM runs, and the rest
when it has ended. It is a process of its own, beside the collector, and only reads."""
