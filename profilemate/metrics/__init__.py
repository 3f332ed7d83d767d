# SPDX-License-Identifier: Apache-2.0
"""The totals of a run as metrics for Prometheus: their text, and the server that hands it out.

Only the collector and the command line use it. It needs prometheus-client, which vLLM brings.
"""
