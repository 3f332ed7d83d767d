# SPDX-License-Identifier: Apache-2.0
"""Check on a real GPU what profilemate records of CUDA graphs: python -m scripts.gpu_check"""
