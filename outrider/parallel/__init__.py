"""One model over several processes, each with its own heads: rank 0 serves, the others follow.

Every rank loads its share of the weights by transformers' tensor-parallel plan, and keeps the keys and values of its
own heads. Rank 0 alone has a pool with books, an engine and clients: before each pass it tells the others the layout,
as plain numbers, and all run it together. Nothing here knows what a pass is for.
"""
