"""What tests share: the other ends of connections, engines that are played, jobs in the background."""
