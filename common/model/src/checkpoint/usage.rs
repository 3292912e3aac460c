//! Which elements of which tensors were read, so that what nothing asked for is found.

use std::collections::HashMap;
use std::ops::Range;

/// The elements that were read, per tensor: disjoint ranges in order, none of which touches the next.
#[derive(Default)]
pub(super) struct Usage(HashMap<String, Vec<Range<usize>>>);

impl Usage {
    /// The elements `range` of `tensor` were read.
    pub fn add(&mut self, tensor: &str, range: Range<usize>) {
        if !self.0.contains_key(tensor) {
            self.0.insert(tensor.to_string(), Vec::new());
        }
        let ranges = self.0.get_mut(tensor).expect("just put there");
        if range.is_empty() {
            return;
        }
        let first = ranges.partition_point(|r| r.end < range.start);
        let behind = ranges.partition_point(|r| r.start <= range.end);
        let mut joined = range;
        if let Some(touched) = ranges.get(first..behind).filter(|t| !t.is_empty()) {
            joined.start = joined.start.min(touched[0].start);
            joined.end = joined.end.max(touched[touched.len() - 1].end);
        }
        ranges.splice(first..behind, [joined]);
    }

    /// The first elements of a tensor of `elements` that were not read; none of a tensor without elements that was asked
    /// for.
    pub fn unused(&self, tensor: &str, elements: usize) -> Option<Range<usize>> {
        let Some(ranges) = self.0.get(tensor) else { return Some(0..elements) };
        let first = match ranges.first() {
            Some(range) if range.start == 0 => range.end,
            _ => 0,
        };
        let next = ranges.iter().map(|r| r.start).find(|&start| start > first).unwrap_or(elements);
        (first < elements).then_some(first..next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_join_in_any_order() {
        // Every order of five pieces of 0..10, against a plain list of flags.
        let pieces = [0..2, 2..3, 3..7, 8..10, 5..9];
        for order in 0..120 {
            let (mut left, mut rest) = ((0..5).collect::<Vec<usize>>(), order);
            let (mut usage, mut seen) = (Usage::default(), [false; 10]);
            while !left.is_empty() {
                let piece = pieces[left.remove(rest % left.len())].clone();
                rest /= left.len() + 1;
                usage.add("t", piece.clone());
                seen[piece].fill(true);
                let first = seen.iter().position(|s| !s);
                let want = first.map(|f| f..seen[f..].iter().position(|s| *s).map_or(10, |n| f + n));
                assert_eq!(usage.unused("t", 10), want, "{seen:?}");
            }
            assert_eq!(usage.0["t"].len(), 1, "all of it is one range");
        }
    }

    #[test]
    fn empty_tensors_and_ranges() {
        let mut usage = Usage::default();
        assert_eq!(usage.unused("t", 0), Some(0..0));
        usage.add("t", 0..0);
        assert_eq!(usage.unused("t", 0), None);
        assert_eq!(usage.unused("t", 4), Some(0..4));
        usage.add("t", 2..2);
        assert_eq!(usage.unused("t", 4), Some(0..4));
    }
}
