"""The decoders that ours are measured beside; all have the shape of `base.Peer`."""
