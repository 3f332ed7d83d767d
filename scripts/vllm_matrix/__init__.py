# SPDX-License-Identifier: Apache-2.0
"""Drive the real scheduler of many vLLM releases, and compare the tables with other counts."""
