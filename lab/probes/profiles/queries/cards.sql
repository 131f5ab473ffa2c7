-- Which card takes the GPU's time: kernels by the function that made them, torch's own by their names.
-- A moment in which kernels overlap counts once, for the kernel that began first, so the shares add up to 1.
WITH
  busy AS (
    SELECT ts, dur,
      CASE WHEN name LIKE '%::make@_%' ESCAPE '@' THEN SUBSTR(name, INSTR(name, '::make_') + 7)
      ELSE name || '::' END AS made,
      MAX(ts + dur) OVER (ORDER BY ts, dur DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
    FROM slice WHERE category = 'kernel'
  ),
  kernels AS (
    SELECT dur, MAX(0, ts + dur - MAX(ts, COALESCE(before, ts))) AS own,
      CASE WHEN made LIKE 'void %' THEN 'torch: ' || SUBSTR(made, 6, 60)
      ELSE SUBSTR(made, 1, INSTR(made, '::') - 1) END AS card
    FROM busy
  )
SELECT
  card,
  COUNT(*) AS kernels,
  ROUND(SUM(own) / 1e3, 1) AS us,
  ROUND(1.0 * SUM(own) / SUM(SUM(own)) OVER (), 4) AS share,
  ROUND(AVG(dur) / 1e3, 2) AS us_a_kernel
FROM kernels
GROUP BY card
ORDER BY SUM(own) DESC;
