use super::*;

fn sampler(config: SamplingParams) -> Sampler {
    Sampler::new(config, std::iter::empty())
}

fn greedy() -> SamplingParams {
    SamplingParams { temperature: 0.0, ..SamplingParams::default() }
}

/// How often each token is drawn from the same logits.
fn histogram(config: SamplingParams, logits: &[f32], draws: usize) -> Vec<usize> {
    let mut sampler = sampler(config);
    let mut counts = vec![0; logits.len()];
    for _ in 0..draws {
        counts[sampler.sample(logits).unwrap().token as usize] += 1;
    }
    counts
}

/// Pearson's statistic against exact probabilities; a token of probability 0 must not occur at all. The bound is the
/// 99.9 % quantile (Wilson and Hilferty's approximation), and the draws are the same in every run.
fn assert_distribution(counts: &[usize], probabilities: &[f64]) {
    let draws: usize = counts.iter().sum();
    let mut statistic = 0.0;
    let mut possible = 0.0;
    for (token, (&count, &probability)) in counts.iter().zip(probabilities).enumerate() {
        if probability == 0.0 {
            assert_eq!(count, 0, "token {token} is impossible");
            continue;
        }
        let expected = probability * draws as f64;
        statistic += (count as f64 - expected).powi(2) / expected;
        possible += 1.0;
    }
    let freedom: f64 = possible - 1.0;
    if freedom == 0.0 {
        return;
    }
    let spread = 2.0 / (9.0 * freedom);
    let bound = freedom * (1.0 - spread + 3.09 * spread.sqrt()).powi(3);
    assert!(statistic < bound, "statistic {statistic:.1} above {bound:.1}: {counts:?} against {probabilities:?}");
}

fn normalised(weights: &[f64]) -> Vec<f64> {
    let total: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / total).collect()
}

/// Logits whose softmax is proportional to the weights.
fn logits_of(weights: &[f64]) -> Vec<f32> {
    weights.iter().map(|weight| weight.ln() as f32).collect()
}

const WEIGHTS: [f64; 6] = [0.10, 0.30, 0.05, 0.25, 0.20, 0.10];
const DRAWS: usize = 60_000;

#[test]
fn draws_follow_the_softmax() {
    let counts = histogram(SamplingParams { seed: 7, ..Default::default() }, &logits_of(&WEIGHTS), DRAWS);
    assert_distribution(&counts, &WEIGHTS);
}

#[test]
fn temperature_sharpens_and_flattens() {
    for temperature in [0.5f32, 2.0] {
        let config = SamplingParams { temperature, seed: 3, ..Default::default() };
        let weights: Vec<f64> = WEIGHTS.iter().map(|weight| weight.powf(1.0 / temperature as f64)).collect();
        assert_distribution(&histogram(config, &logits_of(&WEIGHTS), DRAWS), &normalised(&weights));
    }
}

#[test]
fn seeds_choices_and_indices_are_independent_of_one_another() {
    let logits = logits_of(&WEIGHTS);
    let first = |config| sampler(config).sample(&logits).unwrap().token as usize;
    let mut by_seed = vec![0; WEIGHTS.len()];
    let mut by_choice = vec![0; WEIGHTS.len()];
    let mut pairs = vec![0; WEIGHTS.len() * WEIGHTS.len()];
    for i in 0..DRAWS as u32 {
        by_seed[first(SamplingParams { seed: i as u64, ..Default::default() })] += 1;
        by_choice[first(SamplingParams { seed: 11, choice: i, ..Default::default() })] += 1;
        let mut neighbours = sampler(SamplingParams { seed: i as u64, choice: 1, ..Default::default() });
        let a = neighbours.sample(&logits).unwrap().token as usize;
        let b = first(SamplingParams { seed: i as u64 + 1, choice: 1, ..Default::default() });
        pairs[a * WEIGHTS.len() + b] += 1;
    }
    assert_distribution(&by_seed, &WEIGHTS);
    assert_distribution(&by_choice, &WEIGHTS);
    let products: Vec<f64> = WEIGHTS.iter().flat_map(|a| WEIGHTS.iter().map(move |b| a * b)).collect();
    assert_distribution(&pairs, &products);
}

#[test]
fn top_k_keeps_exactly_k() {
    let config = SamplingParams { top_k: 3, seed: 5, ..Default::default() };
    let expected = normalised(&[0.0, 0.30, 0.0, 0.25, 0.20, 0.0]);
    assert_distribution(&histogram(config, &logits_of(&WEIGHTS), DRAWS), &expected);
    // Equal logits at the edge: the lower id stays.
    let config = SamplingParams { top_k: 4, seed: 5, ..Default::default() };
    let expected = normalised(&[0.10, 0.30, 0.0, 0.25, 0.20, 0.0]);
    assert_distribution(&histogram(config, &logits_of(&WEIGHTS), DRAWS), &expected);
    // One is greedy, and more than there are is all.
    let config = SamplingParams { top_k: 1, ..Default::default() };
    assert_eq!(histogram(config, &[1.0, 2.0, 2.0, -0.0], 100), [0, 100, 0, 0]);
    let config = SamplingParams { top_k: 1000, seed: 5, ..Default::default() };
    assert_distribution(&histogram(config, &logits_of(&WEIGHTS), DRAWS), &WEIGHTS);
}

#[test]
fn top_p_keeps_the_token_that_crosses() {
    let logits = logits_of(&WEIGHTS);
    for (top_p, kept) in [
        (0.01, [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]),
        (0.29, [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]),
        (0.31, [0.0, 0.30, 0.0, 0.25, 0.0, 0.0]),
        (0.56, [0.0, 0.30, 0.0, 0.25, 0.20, 0.0]),
        (0.80, [0.10, 0.30, 0.0, 0.25, 0.20, 0.0]),
        (0.96, WEIGHTS),
    ] {
        let config = SamplingParams { top_p, seed: 9, ..Default::default() };
        assert_distribution(&histogram(config, &logits, DRAWS), &normalised(&kept));
    }
    // Its mass is that of what top-k kept: 0.25 of 0.55 is not yet half, 0.30 is.
    let config = SamplingParams { top_k: 2, top_p: 0.5, ..Default::default() };
    assert_eq!(histogram(config, &logits, 100)[1], 100);
}

#[test]
fn top_p_looks_beyond_its_first_candidates() {
    // Uniform over 1,000 tokens: half of the mass is half of the tokens, those with the lower ids.
    let config = SamplingParams { top_p: 0.4995, seed: 1, ..Default::default() };
    let counts = histogram(config, &[0.5; 1000], DRAWS / 5);
    let expected: Vec<f64> = (0..1000).map(|token| if token < 500 { 1.0 / 500.0 } else { 0.0 }).collect();
    assert_distribution(&counts, &expected);
}

#[test]
fn min_p_is_relative_to_the_likeliest() {
    let config = SamplingParams { min_p: 0.6, seed: 2, ..Default::default() };
    let expected = normalised(&[0.0, 0.30, 0.0, 0.25, 0.20, 0.0]);
    assert_distribution(&histogram(config, &logits_of(&WEIGHTS), DRAWS), &expected);
    let config = SamplingParams { min_p: 1.0, ..Default::default() };
    assert_eq!(histogram(config, &logits_of(&WEIGHTS), 100)[1], 100);
    // It acts after the temperature: at 0.5 the ratios are squared, (0.25 / 0.30)^2 = 0.69.
    let config = SamplingParams { min_p: 0.6, temperature: 0.5, seed: 2, ..Default::default() };
    let expected = normalised(&[0.0, 0.30f64.powi(2), 0.0, 0.25f64.powi(2), 0.0, 0.0]);
    assert_distribution(&histogram(config, &logits_of(&WEIGHTS), DRAWS), &expected);
}

#[test]
fn filters_agree_with_a_full_sort() {
    for seed in 0..300u64 {
        let number = |i: u64| uniform(seed, 77, i);
        let size = 1 + (number(0) * 400.0) as usize;
        // Few distinct values, so that equal logits are common.
        let logits: Vec<f32> = (0..size).map(|i| (number(i as u64 + 10) * 12.0).floor() as f32 / 2.0).collect();
        let config = SamplingParams {
            temperature: 0.3 + number(1) as f32,
            top_k: if number(2) < 0.5 { 0 } else { (number(3) * 300.0) as u32 },
            top_p: if number(4) < 0.3 { 1.0 } else { 0.05 + 0.9 * number(5) as f32 },
            min_p: if number(6) < 0.5 { 0.0 } else { 0.5 * number(7) as f32 },
            seed,
            ..Default::default()
        };
        let mut order: Vec<u32> = (0..size as u32).collect();
        order.sort_by(|&a, &b| likelier(&logits, a, b));
        if config.top_k > 0 {
            order.truncate(config.top_k as usize);
        }
        let likeliest = logits[order[0] as usize] as f64;
        let weight = |token: &u32| ((logits[*token as usize] as f64 - likeliest) / config.temperature as f64).exp();
        let mass: f64 = order.iter().map(weight).sum();
        let mut before = 0.0;
        let kept = order.iter().take_while(|token| {
            let keep = config.top_p == 1.0 || before < config.top_p as f64 * mass * (1.0 - 1e-12);
            before += weight(token);
            keep
        });
        let kept: Vec<u32> = kept.filter(|token| weight(token) >= config.min_p as f64).copied().collect();

        let mut sampler = sampler(config);
        for _ in 0..50 {
            let token = sampler.sample(&logits).unwrap().token;
            assert!(kept.contains(&token), "seed {seed}: {token} is not among {kept:?}");
        }
        let mut left = sampler.candidates.clone();
        let mut expected = kept.clone();
        left.sort_unstable();
        expected.sort_unstable();
        assert_eq!(left, expected, "seed {seed}");
    }
}

#[test]
fn greedy_takes_the_lowest_id_of_equals() {
    assert_eq!(sampler(greedy()).sample(&[0.0, -0.0, -1.0]).unwrap().token, 0);
    assert_eq!(sampler(greedy()).sample(&[-3.0, 4.0, 1.0, 4.0]).unwrap().token, 1);
    assert_eq!(sampler(greedy()).sample(&[f32::NEG_INFINITY, -1e30]).unwrap().token, 1);
}

#[test]
fn a_tiny_temperature_is_greedy_and_does_not_overflow() {
    let config = SamplingParams { temperature: f32::MIN_POSITIVE, ..Default::default() };
    assert_eq!(histogram(config, &[1e30, -1e30, 3e38, 2.9e38], 50), [0, 0, 50, 0]);
}

#[test]
fn repetition_penalty_divides_positive_and_multiplies_negative() {
    let config = SamplingParams { repetition_penalty: 2.0, ..greedy() };
    // Token 0 falls to 2, below token 1.
    let mut penalised = Sampler::new(config.clone(), [0, 0, 9_999].into_iter());
    assert_eq!(penalised.sample(&[4.0, 3.0, -1.0]).unwrap().token, 1);
    // Token 1 is in the answer now, as well as 0 in the prompt; -1 would fall to -2 but is not in either.
    assert_eq!(penalised.sample(&[-0.6, -0.7, -1.0]).unwrap().token, 2);
    // However often a token occurs, the penalty acts once.
    let mut often = Sampler::new(config, [0, 0, 0, 0].into_iter());
    often.resume(&[0, 0]);
    assert_eq!(often.sample(&[4.0, 1.9, -1.0]).unwrap().token, 0);
}

#[test]
fn presence_and_frequency_count_the_answer_only() {
    let config = SamplingParams { presence_penalty: 1.0, ..greedy() };
    let mut presence = Sampler::new(config, [0].into_iter());
    let logits = [2.5, 2.0, 1.0];
    let tokens: Vec<u32> = (0..4).map(|_| presence.sample(&logits).unwrap().token).collect();
    // After 0 and 1 the penalised logits are 1.5, 1.0, 1.0: presence does not add up.
    assert_eq!(tokens, [0, 1, 0, 0]);
    let mut frequency = sampler(SamplingParams { frequency_penalty: 0.75, ..greedy() });
    let tokens: Vec<u32> = (0..5).map(|_| frequency.sample(&logits).unwrap().token).collect();
    // Logits by then: 2.5 2 1 | 1.75 2 1 | 1.75 1.25 1 | 1 1.25 1 | 1 0.5 1: a tie at the end, the lower id.
    assert_eq!(tokens, [0, 1, 0, 1, 0]);
    let mut negative = sampler(SamplingParams { presence_penalty: -2.0, seed: 4, ..Default::default() });
    negative.resume(&[2]);
    let counts = (0..1000).filter(|_| negative.clone().sample(&[0.0, 0.0, 50.0]).unwrap().token == 2).count();
    assert_eq!(counts, 1000);
}

#[test]
fn bias_comes_before_penalties() {
    let config = SamplingParams { logit_bias: vec![(1, 5.0), (1, 5.0)], repetition_penalty: 2.0, ..greedy() };
    // (-4 + 10) / 2 = 3, and not -4 * 2 + 10 = 2.
    let mut biased = Sampler::new(config, [1].into_iter());
    assert_eq!(biased.sample(&[2.5, -4.0]).unwrap().token, 1);
    let ban = SamplingParams { logit_bias: vec![(0, -100.0)], ..Default::default() };
    assert_eq!(histogram(ban, &[3.0, 0.0, f32::NEG_INFINITY], 200), [0, 200, 0]);
}

#[test]
fn logprobs_are_those_of_the_unmodified_logits() {
    let logits = [1.0f32, 2.0, 2.0, -1.0, f32::NEG_INFINITY];
    let config = SamplingParams {
        temperature: 0.5,
        logit_bias: vec![(3, 100.0)],
        top_k: 1,
        repetition_penalty: 1.5,
        logprobs: Some(3),
        ..Default::default()
    };
    let sampled = Sampler::new(config.clone(), [1].into_iter()).sample(&logits).unwrap();
    let total: f64 = logits.iter().map(|&logit| (logit as f64).exp()).sum();
    let expected = |token: usize| (logits[token] as f64 - total.ln()) as f32;
    let logprobs = sampled.logprobs.unwrap();
    assert_eq!(sampled.token, 3);
    assert_eq!(logprobs.chosen, expected(3));
    assert_eq!(logprobs.top, [(1, expected(1)), (2, expected(2)), (0, expected(0))]);

    let top = |logprobs| {
        let config = SamplingParams { logprobs, ..config.clone() };
        sampler(config).sample(&logits).unwrap().logprobs.map(|l| l.top.len())
    };
    assert_eq!(top(None), None);
    assert_eq!(top(Some(0)), Some(0));
    // Impossible tokens are left out, and asking for more than there are is no error.
    assert_eq!(top(Some(50)), Some(4));
}

#[test]
fn logprobs_of_large_logits_stay_exact() {
    let logits: Vec<f32> = (0..50_000).map(|i| 1e4 + (i % 7) as f32).collect();
    let sampled = sampler(SamplingParams { logprobs: Some(7), ..greedy() }).sample(&logits).unwrap();
    let mass: f64 = (0..50_000).map(|i| ((i % 7) as f64 - 6.0).exp()).sum();
    let logprobs = sampled.logprobs.unwrap();
    assert!((logprobs.chosen as f64 + mass.ln()).abs() < 1e-6);
    let ids: Vec<u32> = logprobs.top.iter().map(|&(token, _)| token).collect();
    assert_eq!(ids, [6, 13, 20, 27, 34, 41, 48]);
}

#[test]
fn a_resumed_answer_goes_on_as_it_would_have() {
    let config = SamplingParams {
        top_k: 12,
        top_p: 0.95,
        presence_penalty: 0.4,
        frequency_penalty: 0.3,
        repetition_penalty: 1.2,
        seed: 42,
        choice: 3,
        logprobs: Some(2),
        ..Default::default()
    };
    let logits = |step: u64| -> Vec<f32> { (0..40).map(|i| 4.0 * uniform(step, 1, i) as f32 - 1.0).collect() };
    let prompt = [5, 6, 7];
    let mut whole = Sampler::new(config.clone(), prompt.into_iter());
    let answer: Vec<Sampled> = (0..60).map(|step| whole.sample(&logits(step)).unwrap()).collect();
    for cut in [0, 1, 30, 59] {
        let mut resumed = Sampler::new(config.clone(), prompt.into_iter());
        resumed.resume(&answer[..cut].iter().map(|sampled| sampled.token).collect::<Vec<_>>());
        assert_eq!(resumed.generated(), cut as u64);
        for (step, expected) in answer.iter().enumerate().skip(cut) {
            let sampled = resumed.sample(&logits(step as u64)).unwrap();
            assert_eq!(sampled, *expected, "cut {cut}, step {step}");
        }
    }
    let other = SamplingParams { choice: 4, ..config };
    let mut other = Sampler::new(other, prompt.into_iter());
    let tokens: Vec<u32> = (0..60).map(|step| other.sample(&logits(step)).unwrap().token).collect();
    assert_ne!(tokens, answer.iter().map(|sampled| sampled.token).collect::<Vec<_>>());
}

#[test]
fn bad_logits_are_an_error_and_change_nothing() {
    let config = SamplingParams { frequency_penalty: 1.0, seed: 8, ..Default::default() };
    let mut sampler = sampler(config.clone());
    for (logits, token) in [(vec![0.0, f32::NAN], "token 1 is NaN"), (vec![f32::INFINITY], "token 0 is inf")] {
        for temperature in [0.0, 1.0] {
            sampler.config.temperature = temperature;
            let error = sampler.sample(&logits).unwrap_err();
            assert_eq!(error.field, "logits");
            assert!(error.message.contains(token), "{error}");
        }
    }
    for logits in [vec![], vec![f32::NEG_INFINITY; 3]] {
        assert_eq!(sampler.sample(&logits).unwrap_err().field, "logits");
    }
    assert_eq!(sampler.generated(), 0);
    let good = [0.5, 0.2, 0.9];
    assert_eq!(sampler.sample(&good), Sampler::new(config, std::iter::empty()).sample(&good));
    // A penalty that turns a finite logit infinite.
    let tiny = SamplingParams { repetition_penalty: 1e-30, ..greedy() };
    assert_eq!(Sampler::new(tiny, [0].into_iter()).sample(&[1e20, 0.0]).unwrap_err().field, "logits");
}

#[test]
fn settings_out_of_range_are_refused_by_name() {
    let base = SamplingParams::default;
    for (field, config) in [
        ("temperature", SamplingParams { temperature: -0.1, ..base() }),
        ("temperature", SamplingParams { temperature: 2.1, ..base() }),
        ("temperature", SamplingParams { temperature: f32::NAN, ..base() }),
        ("top_p", SamplingParams { top_p: 0.0, ..base() }),
        ("top_p", SamplingParams { top_p: 1.01, ..base() }),
        ("top_p", SamplingParams { top_p: f32::NAN, ..base() }),
        ("min_p", SamplingParams { min_p: -0.1, ..base() }),
        ("min_p", SamplingParams { min_p: 1.1, ..base() }),
        ("presence_penalty", SamplingParams { presence_penalty: 2.5, ..base() }),
        ("frequency_penalty", SamplingParams { frequency_penalty: -2.5, ..base() }),
        ("repetition_penalty", SamplingParams { repetition_penalty: 0.0, ..base() }),
        ("repetition_penalty", SamplingParams { repetition_penalty: f32::INFINITY, ..base() }),
        ("logit_bias", SamplingParams { logit_bias: vec![(1, 1.0), (2, 101.0)], ..base() }),
    ] {
        let error = config.validate().unwrap_err();
        assert_eq!(error.field, field);
        assert!(error.to_string().contains("use a number"), "{error}");
    }
    let edges = SamplingParams {
        temperature: 2.0,
        min_p: 1.0,
        presence_penalty: -2.0,
        frequency_penalty: 2.0,
        logit_bias: vec![(9, -100.0)],
        ..base()
    };
    assert_eq!(edges.validate(), Ok(()));
    assert_eq!(edges.validate_vocabulary(10), Ok(()));
    let error = edges.validate_vocabulary(9).unwrap_err();
    assert_eq!((error.field, error.message.contains("token 9")), ("logit_bias", true));
    assert_eq!(sampler(edges).sample(&[0.0; 9]).unwrap_err().field, "logit_bias");
}
