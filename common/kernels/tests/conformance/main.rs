//! What every backend must do, tested on random cases against the scalar reference in f64, and the
//! bit-for-bit guarantees of the op set, tested on each backend against itself.
//!
//! Every suite is generic over the backend; the last lines here say which suites run on which. Seeds are
//! fixed, and a failure names backend, seed and case.

mod attention;
mod attention_case;
mod conv;
mod experts;
mod heads;
mod kv;
mod linear;
mod rows;
mod scan;
mod scan_case;
mod scan_inputs;
mod scan_jumps;
mod shapes;
mod support;

/// Run suites on every backend.
macro_rules! conformance {
    ($($suite:ident :: $test:ident),* $(,)?) => {
        mod reference_f32 {
            $(#[test] fn $test() { crate::$suite::$test(&hypic_kernels::Reference::<f32>::new()); })*
        }
        mod cpu {
            $(#[test] fn $test() { crate::support::cpus().iter().for_each(crate::$suite::$test); })*
        }
    };
}

/// Run suites that need no second backend on the f64 reference as well.
macro_rules! properties {
    ($($suite:ident :: $test:ident),* $(,)?) => {
        mod reference_f64 {
            $(#[test] fn $test() { crate::$suite::$test(&hypic_kernels::Reference::<f64>::new()); })*
        }
        conformance!($($suite::$test),*);
    };
}

mod random {
    conformance!(
        linear::linear_matches,
        linear::linear_add_matches,
        linear::embed_matches,
        rows::gather_matches,
        rows::norms_match,
        rows::gates_match,
        rows::bounded_mlps_are_as_written,
        rows::mixes_match,
        heads::copies_match,
        heads::head_linear_matches,
        heads::rotations_match,
        heads::stretched_rotations_have_a_larger_base,
        experts::routes_match,
        experts::experts_match,
        conv::conv_matches,
        scan::every_length_matches,
        scan::every_kind_matches,
        scan::hard_inputs_match,
        scan::walks_match,
        scan::wide_heads_match,
        scan_jumps::jumps_match,
        attention::attention_matches,
        attention::block_edges_match,
        attention::latent_heads_match,
        attention::far_positions_match,
        kv::append_matches,
    );
}

mod guarantees {
    properties!(
        linear::rows_are_independent,
        rows::rows_steps_are_independent,
        heads::quarter_turns_are_as_written,
        heads::head_rows_are_independent,
        experts::softmax_routes_are_as_published,
        experts::sigmoid_routes_are_as_published,
        experts::ties_go_to_the_lower_index,
        experts::nan_logits_are_told,
        experts::expert_rows_are_independent,
        conv::conv_is_cut_anywhere,
        scan::bodies_are_cut_on_the_grid,
        scan::sequences_are_independent,
        scan::body_composes,
        scan::empty_body_is_the_identity,
        scan::overlapping_rows_are_refused,
        scan_jumps::turned_jumps_do_what_they_say,
        scan_jumps::turning_by_nothing_changes_nothing,
        scan_jumps::turns_of_matrices_are_refused,
        attention::spans_are_cut_on_the_grid,
        attention::attention_rows_are_independent,
        attention::turning_queries_is_turning_keys,
        attention::shared_values_are_the_keys,
        kv::stores_keep_their_tokens,
        kv::tensors_keep_their_values,
        shapes::mismatches_panic,
    );
}

mod messages {
    #[test]
    fn reference_names_the_op() {
        crate::shapes::mismatches_name_the_op(&crate::support::reference());
    }

    #[test]
    fn cpu_names_the_op() {
        crate::shapes::mismatches_name_the_op(&hypic_kernels::Cpu::new(1));
    }
}

mod threads {
    #[test]
    fn results_do_not_depend_on_threads() {
        crate::linear::threads_agree();
        crate::heads::threads_agree();
        crate::experts::threads_agree();
        crate::scan::threads_agree();
        crate::attention::threads_agree();
        crate::conv::threads_agree();
    }
}
