# SPDX-License-Identifier: Apache-2.0
"""The check of ``profilemate plan`` against every model class of the installed vLLM."""
