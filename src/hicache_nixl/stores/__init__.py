"""Where records lie: `slab` on local disks."""
