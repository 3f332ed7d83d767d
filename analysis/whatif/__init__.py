# SPDX-License-Identifier: Apache-2.0
"""What would the same requests have done under another configuration?

``workload`` reads the requests of a session or a trace. Two engines simulate them, and give an
``outcome``: ``profilemate.simulation`` through vLLM's own scheduler, and ``fast``, a model of the
cache that needs no vLLM:

    found = fast.curve(workload)                          # a quarter to 16 times the pool
    found = fast.curve(workload, sizes=[1000, 2000])      # usable blocks of each engine
    found = fast.curve(workload.resized(32), policies=["lru", "belady"])
    analysis.renderers.text.miss_ratio_curve.write(found, sys.stdout)
    analysis.renderers.json.render(found)
"""
