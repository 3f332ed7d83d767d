# SPDX-License-Identifier: Apache-2.0
"""Users' applications, which know nothing of profilemate and import nothing of it."""
