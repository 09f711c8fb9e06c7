"""What the machine lends and takes away: hosts, disks, limits, clocks, ways between processes."""
