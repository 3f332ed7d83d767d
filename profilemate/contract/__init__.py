# SPDX-License-Identifier: Apache-2.0
"""A contract for tests: what the prefix cache has to find of an application's prompts.

``plugin`` is the pytest plugin. Nothing here is imported by what records.
"""
