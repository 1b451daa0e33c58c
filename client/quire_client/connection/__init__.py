"""How the SDK reaches gateways: targets, channels, TLS, and what a failed connection means."""
