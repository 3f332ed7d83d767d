# SPDX-License-Identifier: Apache-2.0
"""The sections of a summary: each module words what the domain module of its name found."""
