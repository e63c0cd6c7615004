"""What a job gets: ranks, cores, limits, modules to preload; pure, except for a look at the code folder."""
