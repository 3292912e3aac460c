use super::*;
use hypic_state::HostTensor;

/// Looks random, in [-2, 2].
fn wave(seed: usize, shape: [usize; 2]) -> CpuTensor {
    let value = |i: usize| 2.0 * ((i * i + 7 * i + seed * 13) as f32 * 0.61).sin();
    let values: Vec<f32> = (0..shape[0] * shape[1]).map(value).collect();
    CpuTensor::upload(&HostTensor::from_f32(shape, &values))
}

/// A step of the plain walk.
enum Plain {
    Rows(Range<usize>),
    Jump(CpuTensor),
    Save,
}

/// The definition, in f64: outputs by row, saved windows, last window.
#[allow(clippy::type_complexity)]
fn plain(
    x: &CpuTensor,
    col: usize,
    weight: &CpuTensor,
    bias: Option<&CpuTensor>,
    window: &CpuTensor,
    steps: &[Plain],
) -> (Vec<(usize, Vec<f64>)>, Vec<Vec<f32>>) {
    let (channels, kernel) = (weight.rows(), weight.cols());
    let mut history = window.data().to_vec();
    let (mut outputs, mut windows) = (Vec::new(), Vec::new());
    for step in steps {
        match step {
            Plain::Jump(tail) => history = tail.data().to_vec(),
            Plain::Save => windows.push(history.clone()),
            Plain::Rows(rows) => {
                for row in rows.clone() {
                    history.extend_from_slice(&x.data()[row * x.cols() + col..][..channels]);
                    let output = |c: usize| {
                        let bias = bias.map_or(0.0, |bias| f64::from(bias.data()[c]));
                        let taps = (0..kernel)
                            .map(|i| f64::from(weight.data()[c * kernel + i]) * f64::from(history[i * channels + c]));
                        let sum = bias + taps.sum::<f64>();
                        sum / (1.0 + (-sum).exp())
                    };
                    outputs.push((row, (0..channels).map(output).collect()));
                    history.drain(..channels);
                }
            }
        }
    }
    windows.push(history);
    (outputs, windows)
}

#[test]
fn walks_match_the_definition() {
    for (kernel, channels, with_bias) in
        [(1, 5, true), (2, 16, false), (3, 1, true), (4, 130, false), (4, 300, true), (7, 33, true)]
    {
        let (rows, col) = (60, 3);
        let window = [kernel - 1, channels];
        let x = wave(1, [rows, channels + col + 2]);
        let weight = wave(2, [channels, kernel]);
        let mut bias = wave(3, [1, channels]);
        bias = CpuTensor::upload(&HostTensor::from_f32([channels], bias.data()));
        let bias = with_bias.then_some(&bias);
        // Runs of no row, of one, shorter than the window and longer, in two sequences.
        let walks = [
            vec![
                Plain::Rows(5..5),
                Plain::Save,
                Plain::Rows(5..6),
                Plain::Rows(6..8),
                Plain::Save,
                Plain::Jump(wave(4, window)),
                Plain::Save,
                Plain::Rows(8..9),
                Plain::Rows(9..30),
                Plain::Jump(wave(5, window)),
            ],
            vec![Plain::Rows(40..59), Plain::Save, Plain::Rows(59..60)],
            vec![],
        ];
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            for threads in [1, 2] {
                let mut windows: Vec<CpuTensor> = (0..walks.len()).map(|i| wave(10 + i, window)).collect();
                let want: Vec<_> = windows
                    .iter()
                    .zip(&walks)
                    .map(|(window, steps)| plain(&x, col, &weight, bias, window, steps))
                    .collect();
                let mut saved: Vec<Vec<CpuTensor>> = walks
                    .iter()
                    .map(|walk| {
                        walk.iter().filter(|s| matches!(s, Plain::Save)).map(|_| CpuTensor::zeros(&[0])).collect()
                    })
                    .collect();
                let mut folds: Vec<ConvFold<'_, Cpu>> = windows
                    .iter_mut()
                    .zip(&walks)
                    .zip(&mut saved)
                    .map(|((window, walk), saved)| {
                        let mut saved = saved.iter_mut();
                        let steps = walk.iter().map(|step| match step {
                            Plain::Rows(rows) => ConvStep::Rows(rows.clone()),
                            Plain::Jump(tail) => ConvStep::Jump(tail),
                            Plain::Save => ConvStep::Save(saved.next().expect("one for each save")),
                        });
                        ConvFold { window, steps: steps.collect() }
                    })
                    .collect();
                let mut out = wave(6, [1, 1]);
                conv(isa, &Pool::new(threads), Cols::new(&x, col), &weight, bias, &mut folds, &mut out);
                drop(folds);
                assert_eq!(out.shape(), [rows, channels]);
                for ((outputs, want), (saved, window)) in want.iter().zip(saved.iter().zip(&windows)) {
                    for (row, outputs) in outputs {
                        for (c, want) in outputs.iter().enumerate() {
                            let got = f64::from(out.data()[row * channels + c]);
                            assert!((got - want).abs() < 1e-5, "{isa:?} {kernel} taps: [{row}, {c}] {got}, not {want}");
                        }
                    }
                    for (got, want) in saved.iter().chain([window]).zip(want) {
                        assert_eq!(got.data(), want, "{isa:?}, {kernel} taps: a window");
                    }
                }
            }
        }
    }
}

#[test]
fn a_cut_changes_no_bit() {
    let (rows, channels, kernel) = (700, 200, 4);
    let (x, weight) = (wave(1, [rows, channels]), wave(2, [channels, kernel]));
    for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
        let run = |threads: usize, cuts: &[usize]| {
            let mut window = wave(3, [kernel - 1, channels]);
            let steps = cuts.windows(2).map(|cut| ConvStep::Rows(cut[0]..cut[1])).collect();
            let mut out = CpuTensor::zeros(&[0]);
            let mut folds = [ConvFold { window: &mut window, steps }];
            conv(isa, &Pool::new(threads), Cols::new(&x, 0), &weight, None, &mut folds, &mut out);
            (out, window)
        };
        let whole = run(1, &[0, rows]);
        assert_eq!(whole, run(2, &[0, rows]), "{isa:?}: two threads");
        assert_eq!(whole, run(1, &[0, 1, 2, 64, 65, 128, 698, rows]), "{isa:?}: cuts");
    }
}
