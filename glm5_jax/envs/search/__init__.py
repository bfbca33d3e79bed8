"""Questions whose answers stand in no single passage, and the tools that passages are searched with (GLM-5 4.2.3)."""
