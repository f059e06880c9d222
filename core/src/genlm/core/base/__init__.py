"""What every other part uses: errors, checks of arguments, statistics, synchronous twins."""
