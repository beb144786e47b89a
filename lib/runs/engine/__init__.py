"""What every training run is made of: options, loop, strategies, state, log, world."""
