# SPDX-License-Identifier: Apache-2.0
"""The charts of a report: each module draws what the module of its name found, in the domain or in
``analysis.series``."""
