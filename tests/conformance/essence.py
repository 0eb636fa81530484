"""The checks that the usual tests run on backends whose whole suite takes minutes (`make conformance` runs it): some of
each area, and those that a backend's own way of doing things decides.
"""

ESSENCE = (
    "an_exit_code_and_a_signal_are_told",
    "long_arguments_and_scripts_arrive",
    "a_program_runs_as_the_user_asked_for",
    "twenty_programs_at_once_keep_apart",
    "large_output_arrives_whole",
    "what_nobody_reads_can_hold_the_program_up",
    "input_is_written_piece_by_piece",
    "a_terminal_has_a_size_and_can_be_resized",
    "a_kill_leaves_nothing_of_a_program",
    "a_time_out_ends_all_that_a_program_has_started",
    "rights_are_those_of_the_user_who_asks",
    "trees_go_in_and_come_back",
    "memory_beyond_the_limit_kills_in_the_guest_with_evidence",
    "processes_end_at_their_limit",
    "files_end_at_the_size_of_the_disk",
    "the_platform_gets_through_to_an_exhausted_guest",
    "without_a_network_nothing_is_reached",
    "the_init_is_out_of_a_guests_reach",
    "random_numbers_are_each_sandboxs_own",
    "eight_creates_at_once_make_eight_sandboxes",
    "a_killed_sandbox_is_gone",
    "a_warm_interpreter_runs_source",
    "whatever_is_asked_wakes_a_paused_sandbox",
    "a_hibernated_sandbox_comes_back_as_it_was",
    "forks_start_with_the_files_and_go_their_own_ways",
    "forks_go_on_with_the_programs",
    "a_guest_that_is_killed_from_outside_is_told_as_lost",
    "a_killed_node_loses_no_program_and_no_byte",
)
