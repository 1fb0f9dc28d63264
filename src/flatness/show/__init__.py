"""Pictures and pages from saved results; never from models."""
