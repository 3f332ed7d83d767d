# SPDX-License-Identifier: Apache-2.0
"""What would the requests of several replicas have found if a router had sent them elsewhere?

``replicas`` puts the requests of all replicas into one order. ``rules`` has the routers' rules,
``cache`` what a replica holds, and ``replay`` sends each request where a rule says. ``answer`` has
the figures:

    found = answer.routed(replicas.of_sessions([open_session(path) for path in paths]))
"""
