//! Elementary functions of one f32, and the macro that compiles a loop once per instruction set.
//!
//! The functions are branch-free, so that loops over them become SIMD code, and use multiplication and
//! addition only (never fused), so that they have the same bits on every instruction set. NaN goes through.
//! Largest errors found over the range, in units of the last place: `exp` 1.0, `sigmoid` 2.3, `silu` 2.9,
//! `softplus` 2.8.

/// Define a function that takes the [`Isa`](super::Isa) first and runs a body compiled for it.
///
/// What the body calls must be `#[inline(always)]`, or it is compiled for the baseline.
macro_rules! per_isa {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name(isa: $crate::cpu::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn avx512($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }

            match isa {
                // SAFETY: a backend is built only with an instruction set that the CPU has.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::Isa::Avx512Bf16 | $crate::cpu::Isa::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::Isa::Avx2 => unsafe { avx2($($arg),*) },
                _ => body($($arg),*),
            }
        }
    };
}
pub(super) use per_isa;

/// `1.5 * 2^23`: adding it rounds to an integer that stands in the low bits.
const ROUND: f32 = 12_582_912.0;
/// `ln 2` in two parts; the first has so few bits that its product with an exponent is exact.
const LN_2_HIGH: f32 = 355.0 / 512.0;
const LN_2_LOW: f32 = (std::f64::consts::LN_2 - LN_2_HIGH as f64) as f32;
/// Smallest exponent told apart; `exp` of it, times any f32, is zero.
const LOWEST: f32 = -170.0;
/// `exp` of it is infinite.
const HIGHEST: f32 = 89.0;

/// `exp(x) = p * s * t`, `s` and `t` powers of two, so that no factor overflows or loses bits.
#[inline(always)]
fn exp_factors(x: f32) -> (f32, f32, f32) {
    let x = if x > HIGHEST { HIGHEST } else { x };
    let x = if x < LOWEST { LOWEST } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN_2_HIGH) - n * LN_2_LOW;
    // Taylor's series: |r| <= ln(2) / 2, so what follows is below a tenth of the last place.
    let mut p = 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    let p = p * (r * r) + r + 1.0;
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    (p, power_of_two(half), power_of_two(n.wrapping_sub(half)))
}

/// `2^n` for `-126 <= n <= 127`.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// `e^x`.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    let (p, s, t) = exp_factors(x);
    p * s * t
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    let e = exp(-x.abs());
    (if x < 0.0 { e } else { 1.0 }) / (1.0 + e)
}

/// `x * sigmoid(x)`; zero at minus infinity.
#[inline(always)]
pub(super) fn silu(x: f32) -> f32 {
    let (p, s, t) = exp_factors(-x.abs());
    let bounded = if x < LOWEST { LOWEST } else { x };
    // x e^x with the small factor last: e^x alone may be subnormal.
    let low = bounded * p * s * t;
    (if x < 0.0 { low } else { x }) / (1.0 + p * s * t)
}

/// `ln(1 + e^x)`.
#[inline(always)]
pub(super) fn softplus(x: f32) -> f32 {
    let e = exp(-x.abs());
    // ln(1 + e) = 2 artanh(z), z = e / (2 + e) <= 1/3.
    let twice_z = e * (2.0 / (2.0 + e));
    let z2 = 0.25 * twice_z * twice_z;
    let mut p = 1.0 / 17.0;
    p = p * z2 + 1.0 / 15.0;
    p = p * z2 + 1.0 / 13.0;
    p = p * z2 + 1.0 / 11.0;
    p = p * z2 + 1.0 / 9.0;
    p = p * z2 + 1.0 / 7.0;
    p = p * z2 + 0.2;
    p = p * z2 + 1.0 / 3.0;
    let tail = twice_z + twice_z * (p * z2);
    (if x > 0.0 { x } else { 0.0 }) + tail
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance in units of the last place of the exact value, subnormals included.
    fn ulps(got: f32, exact: f64) -> f64 {
        let rounded = exact as f32;
        if got == rounded {
            return 0.0;
        }
        let magnitude = exact.abs().max(f64::from(f32::MIN_POSITIVE));
        let ulp = 2f64.powi(magnitude.log2().floor() as i32 - 23);
        (f64::from(got) - exact).abs() / ulp
    }

    fn check(name: &str, f: impl Fn(f32) -> f32, exact: impl Fn(f64) -> f64, limit: f64) {
        let mut worst = (0.0, 0.0);
        let magnitudes = (0..400_000).map(|i| 2f32.powf(-40.0 + i as f32 * (48.0 / 400_000.0)));
        let line = (0..2_000_000).map(|i| -120.0 + i as f32 * (240.0 / 2_000_000.0));
        for x in magnitudes.flat_map(|x| [x, -x]).chain(line).chain([0.0, -0.0]) {
            let off = ulps(f(x), exact(f64::from(x)));
            if off > worst.0 {
                worst = (off, x);
            }
        }
        let (off, x) = worst;
        println!("{name}: at most {off:.2} ulp, at {x}");
        assert!(off <= limit, "{name}({x}) = {:e} is off by {off} ulp", f(x));
    }

    #[test]
    fn functions_are_accurate_to_the_last_places() {
        check("exp", exp, f64::exp, 1.1);
        check("sigmoid", sigmoid, |x| 1.0 / (1.0 + (-x).exp()), 2.5);
        check("silu", silu, |x| x / (1.0 + (-x).exp()), 3.0);
        check("softplus", softplus, |x| x.max(0.0) + (-x.abs()).exp().ln_1p(), 3.0);
    }

    #[test]
    fn ends_of_the_range_have_their_limits() {
        let (inf, big) = (f32::INFINITY, f32::MAX);
        assert_eq!([exp(inf), exp(big), exp(-inf), exp(-big), exp(0.0)], [inf, inf, 0.0, 0.0, 1.0]);
        assert_eq!([sigmoid(inf), sigmoid(-inf), sigmoid(0.0)], [1.0, 0.0, 0.5]);
        assert_eq!([silu(inf), silu(-inf), silu(-big), silu(big)], [inf, 0.0, 0.0, big]);
        assert_eq!([softplus(inf), softplus(-inf), softplus(big)], [inf, 0.0, big]);
        for f in [exp, sigmoid, silu, softplus] {
            assert!(f(f32::NAN).is_nan());
        }
    }
}
