"""The contract: `.proto` files and the code generated from them. It knows nothing of who speaks it."""
