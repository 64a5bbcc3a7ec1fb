//! Tree aggregation, with three ways to read the tree.

use super::{Budget, Family};
use crate::error::Result;
use crate::factorize::Observer;
use crate::form::Form;
use crate::form::tree::{Decoder, Tree};
use crate::problem::Problem;

macro_rules! tree {
    ($family:ident, $decoder:ident, $name:literal, $about:literal) => {
        #[doc = $about]
        pub(super) struct $family;

        impl Family for $family {
            fn name(&self) -> &'static str {
                $name
            }

            fn about(&self) -> &'static str {
                $about
            }

            fn fit(&self, problem: &Problem, _: &Budget, _: Observer<'_>) -> Result<Form> {
                Ok(Form::Tree(Tree::new(problem.steps(), Decoder::$decoder)?))
            }
        }
    };
}

tree!(Binary, Binary, "tree", "tree aggregation with the plain binary decoder");
tree!(
    HonakerOnline,
    HonakerOnline,
    "honaker-online",
    "a tree with Honaker's estimator from below, as in DP-FTRL"
);
tree!(HonakerFull, HonakerFull, "honaker-full", "a tree with Honaker's estimator from all nodes, dense");
