//! What every backend must do, tested on random cases against the scalar reference in f64, and the
//! bit-for-bit guarantees of the op set, tested on each backend against itself.
//!
//! Every suite is generic over the backend; the last lines here say which suites run on which. Seeds are
//! fixed, and a failure names backend, seed and case.

mod attention;
mod attention_case;
mod conv;
mod delta;
mod delta_case;
mod kv;
mod linear;
mod rows;
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
        conv::conv_matches,
        delta::every_length_matches,
        delta::hard_inputs_match,
        delta::walks_match,
        delta::wide_heads_match,
        delta::jumps_match,
        attention::attention_matches,
        attention::block_edges_match,
        attention::far_positions_match,
        kv::append_matches,
    );
}

mod guarantees {
    properties!(
        linear::rows_are_independent,
        rows::rows_steps_are_independent,
        conv::conv_is_cut_anywhere,
        delta::delta_is_cut_on_the_grid,
        delta::sequences_are_independent,
        delta::body_composes,
        delta::empty_body_is_the_identity,
        attention::spans_are_cut_on_the_grid,
        attention::attention_rows_are_independent,
        attention::turning_queries_is_turning_keys,
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
        crate::delta::threads_agree();
        crate::attention::threads_agree();
        crate::conv::threads_agree();
    }
}
