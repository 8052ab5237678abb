"""Hardware profiles for the simulator, one JSON file each, every figure with its source."""
