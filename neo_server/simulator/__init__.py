"""The scheduler, the block manager and the policies under a virtual clock."""
