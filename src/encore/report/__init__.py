"""What people look at: tables and JSON. Reads plans and timelines, decides nothing."""
