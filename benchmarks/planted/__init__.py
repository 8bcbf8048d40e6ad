"""Models of any size whose text is known beforehand: the cost of a real pair, at a chosen rate of acceptance."""
