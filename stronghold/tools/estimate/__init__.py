"""`stronghold plan`: what fits, how fast it trains, and what bounds it, before anything runs."""
