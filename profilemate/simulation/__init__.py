# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler, KV cache manager and block pool, without a model, a GPU or an engine.

This is for offline use, in processes of its own: nothing here runs in an engine that is profiled.
"""
