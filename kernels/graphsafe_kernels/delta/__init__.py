"""What the gated delta rule and its per-channel form share: kernel pieces over chunks of tokens."""
