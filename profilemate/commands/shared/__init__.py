# SPDX-License-Identifier: Apache-2.0
"""What several commands use: their options, and how they show results, progress and errors."""
