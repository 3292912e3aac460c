use super::*;
use crate::RopeSpec;
use crate::cpu::CpuTensor;

const SHAPE: KvShape = KvShape { heads: 3, d_k: 10, d_v: 7, shared: false, dtype: DType::F32 };

fn numbers(shape: &[usize], seed: usize) -> CpuTensor {
    let mut t = CpuTensor::zeros(shape);
    t.data_mut().iter_mut().enumerate().for_each(|(i, x)| *x = ((i + 31 * seed) as f32 * 0.37).sin());
    t
}

fn store(shape: KvShape, tokens: usize) -> CpuKv {
    let mut kv = CpuKv::new(shape);
    let (k, v) = (numbers(&[tokens + 2, 32], 1), numbers(&[tokens + 2, 25], 2));
    let positions: Vec<i64> = (0..tokens as i64).collect();
    // In pieces, from the middle of wider matrices.
    let mut done = 0;
    while done < tokens {
        let n = (done % 23 + 1).min(tokens - done);
        let (k, v) = (Cols::new(&k, 1), Cols::new(&v, 2));
        kv.append(
            2 + done..2 + done + n,
            k,
            (!shape.shared).then_some(v),
            Positions::plain(&positions[done..done + n]),
            None,
        );
        done += n;
    }
    kv
}

#[test]
fn what_goes_in_comes_out() {
    for dtype in [DType::F32, DType::Bf16] {
        let shape = KvShape { dtype, ..SHAPE };
        let kv = store(shape, 100);
        assert_eq!((kv.len(), kv.bytes()), (100, (112 * 30 + 100 * 21) * dtype.size()));
        let host = kv.download();
        assert_eq!((host.k.dtype(), host.k.shape(), host.v.shape()), (dtype, &[100, 3, 10][..], &[100, 3, 7][..]));
        let round = |x: f32| {
            if dtype == DType::Bf16 { bf16::from_f32(x).to_f32() } else { x }
        };
        let (k, v) = (numbers(&[102, 32], 1), numbers(&[102, 25], 2));
        for token in 0..100 {
            for i in 0..30 {
                assert_eq!(host.k.to_f32()[token * 30 + i], round(k.data()[(token + 2) * 32 + 1 + i]));
            }
            for i in 0..21 {
                assert_eq!(host.v.to_f32()[token * 21 + i], round(v.data()[(token + 2) * 25 + 2 + i]));
            }
        }
        assert_eq!(CpuKv::upload(&host, shape).download(), host);
        let wide = HostKv {
            k: HostTensor::from_f32(host.k.shape(), &host.k.to_f32()),
            v: HostTensor::from_f32(host.v.shape(), &host.v.to_f32()),
        };
        assert_eq!(CpuKv::upload(&wide, shape).download(), host);
    }
}

#[test]
fn shared_values_take_no_memory_and_are_the_beginning_of_keys() {
    for dtype in [DType::F32, DType::Bf16] {
        let kv = store(KvShape { shared: true, dtype, ..SHAPE }, 100);
        assert_eq!((kv.bytes(), kv.shape().d_v), (112 * 30 * dtype.size(), 0));
        let host = kv.download();
        assert_eq!((host.v.dtype(), host.v.shape()), (dtype, &[100, 3, 0][..]));
        assert_eq!(CpuKv::upload(&host, kv.shape()).download(), host);
        assert_eq!(kv.copy(5..93).download().k.to_f32(), host.k.to_f32()[5 * 30..93 * 30]);
        let keys = host.k.to_f32();
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            for tokens in [0..100, 0..0, 3..4, 5..16, 16..48, 30..71] {
                for d_v in [1, 7, 8, 9, 10] {
                    let mut values = vec![f32::NAN; 3];
                    any_planes!(kv.planes(), planes => planes[1].values(isa, tokens.clone(), 10, d_v, &mut values));
                    let want: Vec<f32> =
                        tokens.clone().flat_map(|token| keys[token * 30 + 10..][..d_v].to_vec()).collect();
                    assert_eq!(values[..tokens.len() * d_v], want, "{isa:?} {tokens:?} {d_v}");
                }
            }
        }
    }
}

#[test]
fn copies_and_prefixes_are_the_tokens_they_name() {
    let kv = store(SHAPE, 100);
    let whole = kv.download();
    for range in [0..100, 0..0, 16..48, 3..4, 5..93, 96..100, 15..17] {
        let copy = kv.copy(range.clone());
        let (host, n) = (copy.download(), range.len());
        assert_eq!(copy.len(), n);
        assert_eq!(host.k.to_f32(), whole.k.to_f32()[range.start * 30..range.end * 30]);
        assert_eq!(host.v.to_f32(), whole.v.to_f32()[range.start * 21..range.end * 21]);
    }
    for len in [100, 65, 64, 50, 0] {
        let mut kv = store(SHAPE, 100);
        kv.truncate(len);
        let positions: Vec<i64> = (len as i64..100).collect();
        let (k, v) = (numbers(&[102, 32], 1), numbers(&[102, 25], 2));
        kv.append(2 + len..102, Cols::new(&k, 1), Some(Cols::new(&v, 2)), Positions::plain(&positions), None);
        assert_eq!(kv.download(), whole, "cut at {len}");
    }
}

#[test]
fn keys_are_turned_as_they_are_appended() {
    let rope = CpuRope::new(&RopeSpec { offset: 2, inv_freq: vec![1.0, 0.1], interleaved: false, scale: 1.0 });
    let (k, v) = (numbers(&[2, 30], 1), numbers(&[2, 21], 2));
    let mut kv = CpuKv::new(SHAPE);
    kv.append(0..2, Cols::new(&k, 0), Some(Cols::new(&v, 0)), Positions::plain(&[-3, 4]), Some(&rope));
    let mut want = k.data().to_vec();
    let turner = rope.turner(4, 1.0);
    turner.turn(Isa::Portable, -3, 0, 10, &mut want[..30]);
    turner.turn(Isa::Portable, 4, 0, 10, &mut want[30..]);
    assert_eq!(kv.download().k.to_f32(), want);
    assert_ne!(want, k.data());
}

#[test]
#[should_panic(expected = "f32 or bf16, not in f16")]
fn other_types_are_refused() {
    CpuKv::new(KvShape { dtype: DType::F16, ..SHAPE });
}
