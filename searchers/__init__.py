"""The search algorithms, one file each, short enough to read beside its paper.

A searcher is a generator function ``(problem, rng, *, options)``; see `imgscale.problem` for its verbs and
`imgscale.registry.searcher` for the decorator.
"""
