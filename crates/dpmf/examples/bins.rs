use dpmf::family::Selector;
use dpmf::problem::Goal;
use dpmf::*;
fn main() -> Result<()> {
    let a: Vec<String> = std::env::args().collect();
    let (n, b): (usize, usize) = (a[1].parse().unwrap(), a[2].parse().unwrap());
    for epsilon in [1.0, 2.0, 4.0, 8.0] {
        let goal = Goal { sampling: Sampling::BallsInBins { bins: b }, epsilon, delta: 1e-5 };
        let problem = Problem::sampled(Workload::prefix_sum(n)?, goal)?;
        for name in &a[3..] {
            let s: Selector = name.parse()?;
            let t = std::time::Instant::now();
            let form = s.family().fit(&problem, &s.budget(), &mut factorize::quiet)?;
            let fit = t.elapsed().as_secs_f64();
            let m = Mechanism::sampled(problem.workload().clone(), &form, problem.participation(), goal.sampling)?;
            let t = std::time::Instant::now();
            let m = m.calibrated(epsilon, 1e-5, 1.0, Default::default())?;
            let sigma = m.privacy().unwrap().calibration().noise_multiplier();
            println!("{epsilon} {name}: rmse {:.4} σ {sigma:.4} fit {fit:.2}s calibrate {:.2}s", sigma * m.loss().sqrt_total() / (n as f64).sqrt(), t.elapsed().as_secs_f64());
        }
    }
    Ok(())
}
