# SPDX-License-Identifier: Apache-2.0
"""Work on many machines, through Ray.

Ray is imported by nothing else, and only once a user names a cluster.
"""
