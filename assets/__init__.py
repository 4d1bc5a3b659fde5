"""What imgscale ships: small real models, the world they were trained on, and fixed prompt lists."""
