# SPDX-License-Identifier: Apache-2.0
"""What did all sessions of a fleet come to, and which replicas stand out?

``partial`` reads one session into a small dataclass, wherever that session is. ``counts`` merges
the figures of several. ``merging`` takes the partials one by one and says what they come to.
"""
