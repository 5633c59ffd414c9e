"""What people look at: tables, JSON, a page, a picture, a snapshot. Reads plans and timelines, decides nothing, and
keeps numbers and names: no graph, no tensor."""
