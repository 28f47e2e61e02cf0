"""Plans, allocates virtually, schedules and replays, computes nothing; also stands in for absent devices."""
