"""Side branch: engines that run a pruned checkpoint. The core never imports it."""
