# SPDX-License-Identifier: Apache-2.0
"""What was found as HTML pages that need nothing but themselves."""
