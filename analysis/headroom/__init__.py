# SPDX-License-Identifier: Apache-2.0
"""How many requests at once does the pool have room for, by the session's own requests?"""
