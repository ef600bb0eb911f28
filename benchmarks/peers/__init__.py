"""The decoders that the strategies are compared with; each is a `base.Peer`."""
