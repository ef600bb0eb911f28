"""The decoders that ours are measured beside, one file each, all of one shape (`base.Peer`)."""
